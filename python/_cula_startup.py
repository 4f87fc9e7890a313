# SPDX-License-Identifier: Apache-2.0
"""Where Python starts with `CULA_FLA=1` or `CULA_TRANSFORMERS=1`, cula.pth imports this. cula is imported
once that project is, and registers with it. Until then nothing of cula is imported, and no PyTorch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import partial

VARIABLES = {"fla": "CULA_FLA", "transformers": "CULA_TRANSFORMERS"}


def wait() -> None:
    """The finder of `cula.integrations` is loaded from its file, since importing it would import cula. Does
    nothing where `cula` is another project's package, or a part of one."""
    package = importlib.util.find_spec("cula")
    for folder in (package and package.submodule_search_locations) or ():
        path = os.path.join(folder, "integrations", "_on_import.py")
        if os.path.exists(path):
            spec = importlib.util.spec_from_file_location("_cula_on_import", path)
            assert spec is not None
            assert spec.loader is not None
            finder = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(finder)
            for project, variable in VARIABLES.items():
                if os.environ.get(variable, "0") not in ("", "0"):
                    finder.when_imported(project, partial(importlib.import_module, "cula"))
            return


wait()
