"""Folders that ColossalAI's Booster saves."""
