"""The folders that verl saves for a step."""
