// What MACA has of its own: 16-bit floats, and waves of 64 whose exchanges take no mask.
#pragma once
#include <mc_runtime.h>
#include <maca_fp16.h>
#include <maca_bfloat16.h>
#define D_WAVE 64
#define D_EXP2(x) exp2f(x)
#define D_INVERSE(y) (1.0f / (y))
#define D_TRAP() __builtin_trap()
#include "gpu.h"
