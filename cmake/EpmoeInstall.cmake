install(DIRECTORY include/epmoe DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS epmoe epmoe_static EXPORT epmoe_unused LIBRARY ARCHIVE)
