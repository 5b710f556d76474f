/* In place of the header that cgo makes: what handles.c calls of Go's, for a program that has it without Go. */
void goFlush(int waits);
