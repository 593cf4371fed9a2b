/* The header is C, and the library can be called from it. */
#include <stdio.h>
#include <string.h>

#include "uniep/c_api.h"

int main(void) {
  uniep_group_config config = {0};
  uniep_group* group = NULL;
  uniep_problem problem = {0};
  uniep_memory_needs needs = {0};
  config.size = 1;
  if (uniep_group_create(&config, &group) != 0) {
    printf("%s\n", uniep_last_error());
    return 1;
  }
  uniep_group_destroy(group);
  if (uniep_needs(&problem, 0, 1, &needs) != 1 || strlen(uniep_last_error()) == 0) return 2;
  return strlen(uniep_version()) == 0 ? 3 : 0;
}
