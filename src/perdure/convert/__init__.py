"""Takes leaves out of run directories and into new ones: averages, exports, imports."""

from perdure.convert.averaging import average
from perdure.convert.exchange import export, import_run
from perdure.convert.formats import NameMap

__all__ = ["NameMap", "average", "export", "import_run"]
