"""The search: of all forms of a step and all their plans, the fastest that compiles to the budget."""
