# cmake -DNM=... "-DOBJECTS=..." -P check_isa_objects.cmake: the objects that are compiled with AVX
# flags must define no weak symbol. The linker would be free to take such a function (an inline one
# of a header, say) for the whole program, and it would then fault on a CPU without AVX.
list(FILTER OBJECTS INCLUDE REGEX "kernels_(portable|avx2|avx512)\\.")
if(NOT OBJECTS)
  message(FATAL_ERROR "no object of the kernels was given")
endif()
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} -C --defined-only ${object} OUTPUT_VARIABLE symbols
                  COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]* [WwVu] [^\n]*" shared "${symbols}")
  list(FILTER shared EXCLUDE REGEX "DW\\.ref\\.")  # data of the exception tables
  if(shared)
    string(REPLACE ";" "\n" shared "${shared}")
    message(FATAL_ERROR "${object} defines weak symbols:\n${shared}")
  endif()
endforeach()
