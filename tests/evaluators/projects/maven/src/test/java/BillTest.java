import org.junit.*;
public class BillTest {
  @Test public void adds() { Assert.assertEquals(5, Bill.total(2, 3)); }
}
