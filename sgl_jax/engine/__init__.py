"""The engine loop and its process, the frontend that feeds it, and the offline API."""
