"""Which latents a density ties together, read off its program.

A function of params and latents comes in; the connected component of each latent and of
each term of the density goes out.
"""
