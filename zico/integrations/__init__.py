"""What trainers and hyperparameter searches report of a job in a pool; each library in a module of its own."""
