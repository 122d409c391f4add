#include <immintrin.h>
#define KERNELS kernels_amx
#define NAME "amx"
#include "isa.h"
