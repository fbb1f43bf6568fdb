"""Run folders -> one HTML file that needs nothing else: what `autonl report` does.

Drawn as inline SVG and HTML by jinja2 with a small script. plotly's own script alone is 4.8 MB.
"""
