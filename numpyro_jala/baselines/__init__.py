"""Other algorithms of the same kind, for comparison: particles without weights.

They share the models, the interface and the results of JALAEM, and give no evidence.
"""
