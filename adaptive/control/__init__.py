"""How many tokens to draft: policies that choose a draft length each round."""
