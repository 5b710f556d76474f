/* In place of the header that cgo makes: what handles.c and doorbell.c call of Go's, for programs that have them
 * without Go. */
void goFlush(int waits);
void goServe(void);
