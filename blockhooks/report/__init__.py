"""Figures of a profile and what shows them: tables, traces, comparisons, and a page.

Everything here is made from plain numbers, strings, lists and dicts, knows no tensor, and imports the errors alone; so
it lies below the hooks.
"""
