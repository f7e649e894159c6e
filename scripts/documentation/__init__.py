"""The documentation's machinery: what is generated for its pages, its pictures, and its screenshots."""
