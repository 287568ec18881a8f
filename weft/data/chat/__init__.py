"""Conversations: messages, chat templates, and the tokens of answers."""
