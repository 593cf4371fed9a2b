# cmake -DNM=... "-DISAS=..." "-DOBJECTS=..." -P check_isa_objects.cmake: the objects of the kernels, one
# for each instruction set, must define no weak symbol. The linker would be free to take such a function
# (an inline one of a header, say) for the whole program, and one that was compiled with AVX flags would
# then fault on a CPU without AVX.
set(kernels "")
foreach(isa IN LISTS ISAS)
  set(own ${OBJECTS})
  list(FILTER own INCLUDE REGEX "/kernels_${isa}\\.")
  list(LENGTH own count)
  if(NOT count EQUAL 1)
    message(FATAL_ERROR "${count} objects of kernels_${isa} were given; 1 is accepted")
  endif()
  list(APPEND kernels ${own})
endforeach()
if(NOT kernels)
  message(FATAL_ERROR "ISAS is empty; the instruction sets that the library is built for are accepted")
endif()
foreach(object IN LISTS kernels)
  execute_process(COMMAND ${NM} -C --defined-only ${object} OUTPUT_VARIABLE symbols
                  COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]* [WwVu] [^\n]*" shared "${symbols}")
  list(FILTER shared EXCLUDE REGEX "DW\\.ref\\.")  # data of the exception tables
  if(shared)
    string(REPLACE ";" "\n" shared "${shared}")
    message(FATAL_ERROR "${object} defines weak symbols:\n${shared}")
  endif()
endforeach()
