#define KERNELS kernels_avx512
#define NAME "avx512"
#include "isa.h"
