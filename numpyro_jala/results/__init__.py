"""What a finished run says.

A run comes in; tables, warnings, comparisons and ArviZ objects go out.
"""
