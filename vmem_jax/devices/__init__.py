"""What devices have, and descriptions of cards that are not there."""
