"""Tables of the papers that are calculations: nothing is compiled or run."""

COMPUTED = {}
