"""What runs inside a user's process: loading of adapters, the session, and import-table hooks."""
