"""How anything is written: templates, formats, SVG."""
