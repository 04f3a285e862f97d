"""Messages in the formats people already have -> change events; what events refer to, HTML and PDF -> text.

`EventReader.read` is the one function that the pipeline calls. docs/events.md has the mapping.
"""

from ingest.formats.reader import EventReader

__all__ = ["EventReader"]
