"""Reports: they read values and run nothing."""
