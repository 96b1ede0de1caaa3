from nbtools.tasks.common.files import File as File
from nbtools.tasks.common.files import require as require
from nbtools.tasks.common.files import whole as whole
from nbtools.tasks.common.files import write_demo as write_demo
