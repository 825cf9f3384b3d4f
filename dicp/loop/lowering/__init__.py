"""From ATen to the loop IR: one file per operator family, one rule per operator."""

from dicp.loop.lowering.activation import ACTIVATION
from dicp.loop.lowering.average_pooling import AVERAGE_POOLING
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.creation import CREATION
from dicp.loop.lowering.indexing import INDEXING
from dicp.loop.lowering.interpolation import INTERPOLATION
from dicp.loop.lowering.library import LIBRARY
from dicp.loop.lowering.loss import LOSS
from dicp.loop.lowering.max_pooling import MAX_POOLING
from dicp.loop.lowering.normalization import NORMALIZATION
from dicp.loop.lowering.padding import PADDING
from dicp.loop.lowering.pointwise import POINTWISE
from dicp.loop.lowering.random import RANDOM
from dicp.loop.lowering.reduction import REDUCTION
from dicp.loop.lowering.replacing import REPLACING
from dicp.loop.lowering.scan import SCAN
from dicp.loop.lowering.scatter import SCATTER
from dicp.loop.lowering.softmax import SOFTMAX
from dicp.loop.lowering.views import VIEWS
from dicp.rules import NoRule, RuleTable

RULES = POINTWISE.merged(
    ACTIVATION, CREATION, VIEWS, REDUCTION, SOFTMAX, NORMALIZATION, INDEXING, SCATTER, RANDOM,
    LIBRARY, AVERAGE_POOLING, MAX_POOLING, LOSS, SCAN, PADDING, INTERPOLATION,
    REPLACING,
)  # fmt: skip

__all__ = ["RULES", "Lowering", "NoRule", "RuleTable", "Value"]
