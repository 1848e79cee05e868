# What Horovod 0.28.1's CMake project needs to hear; read at each project() call.

# It asks for C++14 and torch's headers need newer: where CMake is asked for C++14 it passes C++20.
set(CMAKE_CXX14_STANDARD_COMPILE_OPTION "-std=c++20")
set(CMAKE_CXX14_EXTENSION_COMPILE_OPTION "-std=gnu++20")

# The library finds MPI and torch from where it lies (<venv>/lib/pythonX.Y/site-packages/horovod/torch), so that the
# wheel in the cache stays good when the checkout moves; MPI_FOLDERS are those of a site's MPI. No path of the build
# gets into it.
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(CMAKE_INSTALL_RPATH "$ORIGIN/../../../..;$ORIGIN/../../torch/lib;$ENV{MPI_FOLDERS}")

# The MPI is the one whose compiler wrappers set_up.py names; CMake would look beside mpiexec first.
if(DEFINED ENV{MPI_WRAPPERS})
  set(MPI_C_COMPILER "$ENV{MPI_WRAPPERS}/mpicc" CACHE FILEPATH "")
  set(MPI_CXX_COMPILER "$ENV{MPI_WRAPPERS}/mpicxx" CACHE FILEPATH "")
endif()

function(horovod_begin_with_the_last)
  if(TARGET pytorch)
    get_target_property(sources pytorch SOURCES)
    list(REVERSE sources)
    set_property(TARGET pytorch PROPERTY SOURCES ${sources})
  endif()
endfunction()

if(PROJECT_NAME STREQUAL "horovod")
  # Debug information of torch's headers is a quarter of the build and most of the wheel. Horovod makes -O3 of this, for
  # Gloo in it too, as it does of CMake's own flags.
  set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -DNDEBUG")
  # The two units that read torch's headers take longest and come last, where one core has nothing else left to do.
  if(CMAKE_VERSION VERSION_GREATER_EQUAL 3.19)
    cmake_language(DEFER CALL horovod_begin_with_the_last)
  endif()
endif()
