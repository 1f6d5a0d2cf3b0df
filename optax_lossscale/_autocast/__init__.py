"""Float32 functions that compute in half precision where that is fast and safe."""

import os

from optax_lossscale._jaxprs import lines

FOLDER = os.path.dirname(__file__) + os.sep
lines.PASSED.append(FOLDER)
