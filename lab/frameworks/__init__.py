"""What plans for functions that a framework compiles or only pretends to run."""
