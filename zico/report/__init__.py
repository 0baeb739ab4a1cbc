"""What is shown of a run: its figures, tables, pictures and progress. Data in, an open file to write to."""
