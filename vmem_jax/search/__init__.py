"""The search for the fastest plan, of any form of a step, that compiles to the budget."""
