"""Policies that choose the draft length of each round."""
