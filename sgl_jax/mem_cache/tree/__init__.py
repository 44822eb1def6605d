"""The prefix tree, its components, and the cursors of waiting prompts."""
