"""The APIs, a file each: body, requests, events, answer."""
