# CMake tool-chain file for building Horovod 0.28.1: has every project() call also read horovod_project.cmake.
set(CMAKE_PROJECT_INCLUDE "${CMAKE_CURRENT_LIST_DIR}/horovod_project.cmake")
