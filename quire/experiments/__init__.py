"""Experiments of the page: small measurements of the demo model, in a short-lived process of their own."""
