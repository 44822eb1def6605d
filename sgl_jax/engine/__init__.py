"""The engine loop and its process, the front that feeds it, and the offline API."""
