"""Takes leaves out of run directories and into new ones: averages, exports, imports."""

from perdure.convert.averaging import average
from perdure.convert.exporting import export
from perdure.convert.formats import NameMap
from perdure.convert.importing import import_run

__all__ = ["NameMap", "average", "export", "import_run"]
