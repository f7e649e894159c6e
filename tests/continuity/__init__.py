"""Test what goes on under another layout besides the state."""
