"""Trials of learners' answers: they run on ranks, feed an answer its inputs, and return what it did as plain data."""
