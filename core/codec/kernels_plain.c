/* Kernels in the instruction set that every machine of the platform has. */
#define LEVEL plain
#define TARGET
#include "kernels.h"
