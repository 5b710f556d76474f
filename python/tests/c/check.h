/* Checks that end the program with the line and the library's message. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what)                                                                                         \
  do {                                                                                                      \
    if (!(what)) {                                                                                          \
      fprintf(stderr, "%s:%d: %s is not so; last error: %s\n", __FILE__, __LINE__, #what, pl_last_error()); \
      exit(1);                                                                                              \
    }                                                                                                       \
  } while (0)
#define OK(call) CHECK((call) == 0)
