"""Generates parts of the documentation's pages, its pictures and its screenshots."""
