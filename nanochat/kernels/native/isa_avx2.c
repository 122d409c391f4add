#define KERNELS kernels_avx2
#define NAME "avx2"
#include "isa.h"
