"""Building blocks of models, and sampling."""
