from nbtools.tasks.common.metrics import THUMB as THUMB
from nbtools.tasks.common.metrics import at_most as at_most
from nbtools.tasks.common.metrics import bucket_knob as bucket_knob
from nbtools.tasks.common.metrics import epochs_for as epochs_for
