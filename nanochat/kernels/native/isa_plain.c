#define KERNELS kernels_plain
#define NAME "plain"
#include "isa.h"
