"""Operators that write to a tensor they are given: an output has the name of an input."""

# ruff: noqa: E501

TABLES: dict[str, str] = {
    "elewise_calculation_ops.h": """
Assign: ref:any value:=ref -> ref:=ref | validate_shape:Bool=true use_locking:Bool=false
""",
    "selection_ops.h": """
StridedSliceAssign: var:single+int16+int32 begin:index end:index strides:index input_value:=var -> var:=var | begin_mask:Int=0 end_mask:Int=0 ellipsis_mask:Int=0 new_axis_mask:Int=0 shrink_axis_mask:Int=0
""",
    "matrix_calculation_ops.h": """
ScatterElementsV2: var:number indices:index updates:=var -> var:=var | axis:Int=0 reduction:String=none
ScatterNdUpdate: var:number+bool indices:index updates:=var -> var:=var | use_locking:Bool=false
""",
}
