"""Data of recommenders: ratings with what is known of users and items."""
