"""Compiling a step: for the devices that are there, and for cards that are not."""
